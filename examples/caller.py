"""A caller that handles 429 and 503.

    python examples/caller.py http://127.0.0.1:8420

It starts ten orders, one run each, for a tenant with a cap of two. The client retries within its
policy. After that the caller decides: if the tenant is full, it retries later with the same key; if
the server is unavailable, it stops and reports the error.

The server must run without API keys, as `stanchion serve` does by default, so that the example may
register its workflow and set the tenant's cap.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import stanchion
from stanchion.client.signals import Answered, CallSignal, GaveUp, Retrying

TENANT = "caller-example"
ORDERS = 10
PATIENCE_S = 60.0

WORKFLOW = """
id: ship-order
steps:
  pack: {delay_s: 0.5}
"""

counts: Counter[str] = Counter()


def count(signal: CallSignal) -> None:
    """Count signals, as your metrics would. Called in the thread that makes the call."""
    match signal:
        case Retrying():
            counts[f"retries of class {signal.retry_class}"] += 1
        case GaveUp():
            counts[f"gave up: {signal.reason}"] += 1
        case Answered():
            counts["requests"] += 1


def ship(client: stanchion.Client, order: str, give_up_at_s: float) -> str:
    """Ship one order exactly once, with as many starts as needed."""
    while True:
        try:
            # The order's number is the key: if a response is lost, or another process repeats the
            # start after a crash, it is still one run.
            run = client.start("ship-order", {"order": order}, idempotency_key=order)
            return str(run.wait(timeout_s=PATIENCE_S).status)
        except stanchion.TenantFull as full:
            # The client has retried a few times. The order must wait for a free slot; a service
            # would put it back into its own queue here.
            wait_s = max(0.5, full.retry_after_s)
            if time.monotonic() + wait_s > give_up_at_s:
                return "not today"
            say(f"{order}: full ({full.active} of {full.limit}), retry in {wait_s:.1f} s")
            time.sleep(wait_s)


def main(url: str) -> int:
    """Ship all orders; return the exit code."""
    with stanchion.Client(url, tenant=TENANT, on_event=count) as client:
        try:
            client.apply_workflow(WORKFLOW)
            client.request("PUT", f"/v1/admin/tenants/{TENANT}", {"max_concurrent_runs": 2})
            batch, give_up_at_s = uuid.uuid4().hex[:8], time.monotonic() + PATIENCE_S
            orders = [f"order-{batch}-{number}" for number in range(ORDERS)]
            with ThreadPoolExecutor(ORDERS) as pool:
                ends = Counter(pool.map(lambda order: ship(client, order, give_up_at_s), orders))
        except stanchion.ServerUnavailable as unavailable:
            # 503 or no response: the client has retried as often as its policy and the process's
            # budget allow. More retries would only add load; an operator must act.
            say(f"the server is unavailable: {unavailable}")
            return 1
    say("orders: " + ", ".join(f"{number} {status}" for status, number in ends.items()))
    for what, how_often in sorted(counts.items()):
        say(f"{what}: {how_often}")
    return 0 if ends["succeeded"] == ORDERS else 1


speaking = threading.Lock()


def say(what: str) -> None:
    """Print a whole line from any thread."""
    with speaking:
        print(what, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 2:  # noqa: PLR2004 - the program and one argument
        sys.exit("usage: python examples/caller.py URL")
    sys.exit(main(sys.argv[1]))
