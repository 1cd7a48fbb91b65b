"""The bus on NATS: calls in one JetStream stream, bells on core NATS.

``connection`` keeps a connection and replaces it when it breaks; ``stream`` creates or checks the
stream; ``consumer`` fetches calls and answers them; ``bus`` puts these together and sends bells.
"""

from stanchion.adapters.bus.nats.bus import NatsBus

__all__ = ["NatsBus"]
