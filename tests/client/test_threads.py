"""Threads that share a client."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
from stanchion.client.requests import decoder_of
from stanchion.transport.messages import HttpReply
from stanchion.wire.runs import RunView

sys.setswitchinterval(1e-6)
read, together = decoder_of(RunView), threading.Barrier(8)
reply = HttpReply(200, {}, b'{"run_id": "r", "tenant": "t", "status": "running"}')


def decode():
    together.wait()
    for _ in range(50):
        try:
            read(reply)
        except ValueError:
            pass


threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_the_first_answers_of_several_threads_do_not_crash_the_process() -> None:
    # It crashed one process in six: msgspec prepares a type when it is first decoded.
    ends = [subprocess.run([sys.executable, "-c", PROGRAM], check=False) for _ in range(12)]
    assert [each.returncode for each in ends] == [0] * 12
