"""Peers: the same three steps on other systems, from their published packages.

    python -m bench.peers install        into reports/peers: a virtual environment and a npm prefix
    python -m bench.peers                measure them alone

``restate_service``, ``temporal_worker``, ``temporal_load`` and ``dbos_runs`` run in that
environment and import only ``closed_loop`` of our modules.
"""
