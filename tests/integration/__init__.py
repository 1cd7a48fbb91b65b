"""Real processes and real servers: what is promised holds when they are cut, stopped and killed."""
