"""The bus on NATS: calls in one JetStream stream, bells on core NATS.

``link`` keeps a connection and makes a new one whenever it breaks; ``stream`` makes or checks what
must be on the server; ``pulling`` fetches calls and returns their dispositions; ``bells`` rings.
"""

from stanchion.adapters.bus.nats.bus import NatsBus

__all__ = ["NatsBus"]
