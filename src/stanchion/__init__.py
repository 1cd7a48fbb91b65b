"""Stanchion: a control plane for AI-agent workflow runs that acts by written policy."""
