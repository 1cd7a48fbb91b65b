"""The gateway: the HTTP interface as an ASGI app, and the server that runs it.

``routes`` declares every endpoint once; ``endpoint`` handles a request from its head to its answer;
``problems`` builds the answers of refused requests.
"""

from stanchion.gateway.app import Gateway, make_app
from stanchion.gateway.options import GatewayOptions

__all__ = ["Gateway", "GatewayOptions", "make_app"]
