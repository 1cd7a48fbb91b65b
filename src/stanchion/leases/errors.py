"""Why a lease was not granted, split by who acts.

    LeaseNotGranted
    ├── LeaseBusy          another has it: the caller waits longer, or comes back
    └── LeaseUnavailable   the lock store cannot be asked, and policy says not to go on without it:
                           an operator looks

A lease that was granted and then lost is ``LeaseLost``: the work had begun.
"""

from __future__ import annotations

__all__ = ["LeaseBusy", "LeaseNotGranted", "LeaseUnavailable"]


class LeaseNotGranted(Exception):
    """The body did not run."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"the lease on '{name}' was not granted: {message}")
        self.name = name


class LeaseBusy(LeaseNotGranted):
    """Another has it, in this process or elsewhere."""

    def __init__(self, name: str, *, waited_s: float, expires_in_ms: int | None) -> None:
        super().__init__(name, f"another has it (waited for {waited_s:.1f} s)")
        self.waited_s = waited_s
        self.expires_in_ms = expires_in_ms
        """When it may be free, if nobody renews; ``None`` if it is held in this process."""


class LeaseUnavailable(LeaseNotGranted):
    """The lock store could not be asked."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, f"the lock store cannot be asked ({reason})")
        self.reason = reason
