"""The worker SDK: ``Worker`` leases jobs from a server and runs your functions on them.

``worker`` is the public class, ``loop`` leases jobs and runs handlers (``tasks``, ``processes``),
``renewal`` renews their leases, ``revocation`` learns at once of cancelled jobs, ``results`` sends
results, ``server`` has the calls.
"""

from stanchion.core.lease import FenceCause, LeaseLost
from stanchion.worker import events
from stanchion.worker.errors import BadTarget, Cancelled, FinalError, JobFailed, WorkerRefused
from stanchion.worker.job import Job
from stanchion.worker.worker import Worker

__all__ = [
    "BadTarget",
    "Cancelled",
    "FenceCause",
    "FinalError",
    "Job",
    "JobFailed",
    "LeaseLost",
    "Worker",
    "WorkerRefused",
    "events",
]
