"""The worker SDK: ``Worker`` leases jobs from a server and runs your functions on them.

``worker`` is the face, ``working`` the loop behind it. ``keeping`` renews leases, ``reporting``
sends results, ``server`` says what answers mean, ``transport`` carries them.
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
