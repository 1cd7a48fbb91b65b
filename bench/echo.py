"""Baseline for a start: a bare Starlette endpoint that decodes the same body and sends it back.

    python -m bench.echo PORT

The settings of uvicorn are those of ``stanchion.gateway.server``, on the same event loop, without
our wrapper around the protocol, whose cost counts as ours.
"""

from __future__ import annotations

import sys

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stanchion.wire.runs import StartRun

__all__: list[str] = []

DECODER = msgspec.json.Decoder(StartRun)
ENCODER = msgspec.json.Encoder()


async def echo(request: Request) -> Response:
    body = DECODER.decode(await request.body())
    return Response(ENCODER.encode(body), media_type="application/json")


async def health(_request: Request) -> Response:
    return Response()


def main(port: int) -> None:
    app = Starlette(
        routes=[
            Route("/v1/workflows/{workflow_id}/runs", echo, methods=["POST"]),
            Route("/readyz", health),
        ]
    )
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=port,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=2_048,
        timeout_keep_alive=75,
    )
    uvloop.run(uvicorn.Server(config).serve())


if __name__ == "__main__":
    main(int(sys.argv[1]))
