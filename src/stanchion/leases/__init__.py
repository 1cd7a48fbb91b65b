"""Leases for your own code: ``Leases`` for coroutines, ``SyncLeases`` for threads.

What a hold does when the store errs is chosen by ``risk`` (``core.lease_policy``); renewal and
fencing are the server's own (``services.leasing``). Here are the doors of one process (``doors``),
the waiting (``waiting``), and the two faces (``leases``, ``threads``).
"""

from stanchion.core.lease import FenceCause, LeaseLost
from stanchion.core.lease_policy import LeasePolicy, OnLockError, OnRenewalLost
from stanchion.core.model import Risk
from stanchion.leases.errors import LeaseBusy, LeaseNotGranted, LeaseUnavailable
from stanchion.leases.leases import Leases
from stanchion.leases.threads import SyncLeases
from stanchion.services import lease_events as events
from stanchion.services.lease import Lease

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
