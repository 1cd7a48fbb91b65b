"""Services: the shell around the core. They ask the core what to do, and the ports to do it."""
