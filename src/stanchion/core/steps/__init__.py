"""Step kinds: one module each.

A kind is two functions. ``start`` is called when the needs of the step are met and its condition
holds; ``handle`` is called for every event that names the step. Both write the changes into the
draft; ``handle`` returns the reason if the event changes nothing. ``core.run`` chooses the module
by the type of the step's spec.
"""
