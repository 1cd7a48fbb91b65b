"""The gateway: everything over HTTP, and status codes that mean something.

``routes`` declares every endpoint once; ``endpoint`` is the course that each request takes;
``problems`` is how a request that was not fulfilled is answered.
"""

from stanchion.gateway.app import Gateway, make_app
from stanchion.gateway.options import GatewayOptions

__all__ = ["Gateway", "GatewayOptions", "make_app"]
