"""Leases for your own code: ``Leases`` for coroutines, ``SyncLeases`` for threads.

What a hold does when the store fails is chosen by ``risk`` (``core.lease``); renewal and
fencing are the server's own (``services.leasing``). ``holder`` queues the tasks of one process and
asks the store, ``waiting`` waits for a name that is taken, ``backend`` opens the store of a URL,
and ``leases`` and ``threads`` are the two public classes.
"""

from stanchion.core.lease import FenceCause, LeaseLost, LeasePolicy, OnLockError, OnRenewalLost
from stanchion.core.model import Risk
from stanchion.leases.holder import LeaseBusy, LeaseNotGranted, LeaseUnavailable
from stanchion.leases.leases import Leases
from stanchion.leases.threads import SyncLeases
from stanchion.services import lease_events as events
from stanchion.services.renewal import Lease

__all__ = [
    "FenceCause",
    "Lease",
    "LeaseBusy",
    "LeaseLost",
    "LeaseNotGranted",
    "LeasePolicy",
    "LeaseUnavailable",
    "Leases",
    "OnLockError",
    "OnRenewalLost",
    "Risk",
    "SyncLeases",
    "events",
]
