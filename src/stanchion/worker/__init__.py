"""The worker SDK: ``Worker`` leases jobs from a server and runs your functions on them.

``worker`` is the public class, ``loop`` leases jobs and runs handlers (``tasks``, ``processes``),
``renewal`` renews their leases, ``results`` sends results, ``server`` has the calls.
"""

from stanchion.core.lease import FenceCause, LeaseLost
from stanchion.worker import events
from stanchion.worker.errors import BadTarget, FinalError, JobFailed, WorkerRefused
from stanchion.worker.job import Job
from stanchion.worker.worker import Worker

__all__ = [
    "BadTarget",
    "FenceCause",
    "FinalError",
    "Job",
    "JobFailed",
    "LeaseLost",
    "Worker",
    "WorkerRefused",
    "events",
]
