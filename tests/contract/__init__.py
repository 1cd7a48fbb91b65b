"""The contract: what every store and every lock server promises, as cases that all of them pass."""
