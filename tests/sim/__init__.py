"""The simulator: bad days, the checks that look at them, and defects that they must find."""
