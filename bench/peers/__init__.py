"""Peers: the same three steps on other systems, from the packages that their makers publish.

    python -m bench.peers install        into reports/peers: a virtual environment and a npm prefix
    python -m bench.peers                measure them alone

``restate_service``, ``temporal_worker``, ``temporal_load`` and ``dbos_runs`` run in that
environment and know nothing of ours but ``closed_loop``.
"""
