"""The console: pages to see, understand and steer a deployment, on every server at ``/console``.

``mount`` adds it to a gateway. ``app`` runs a request, ``page`` says what a page is, ``pages`` has
them all, ``api`` is their only way to the services.
"""

from __future__ import annotations

from stanchion.console.app import Console
from stanchion.console.pages import ACTIONS, PAGES
from stanchion.gateway import Gateway

__all__ = ["Console", "mount"]


def mount(gateway: Gateway) -> Console:
    """Serve the console under ``/console`` of this gateway."""
    console = Console(gateway, PAGES, ACTIONS)
    gateway.mount("console", console, close=console.close)
    gateway.mount("", console, close=console.close)
    return console
