"""Print the OpenAPI document: ``python -m stanchion.gateway > schema/openapi.json``."""

import sys

from stanchion.gateway.openapi import text
from stanchion.gateway.routes import ROUTES

sys.stdout.write(text(ROUTES))
