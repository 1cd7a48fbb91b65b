"""Services: the imperative shell. They call the core for decisions and the ports for effects."""
