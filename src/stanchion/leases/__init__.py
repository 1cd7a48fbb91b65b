"""Leases for your own code: ``Leases`` for coroutines, ``SyncLeases`` for threads.

``risk`` chooses what a hold does when the store fails (``core.lease``); renewal and fencing are
those of the server (``services.leasing``). ``holder`` queues the tasks of one process and acquires
names, ``waiting`` waits for a name that is held, ``backend`` opens the store of a URL, and
``leases`` and ``threads`` have the two public classes.
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
