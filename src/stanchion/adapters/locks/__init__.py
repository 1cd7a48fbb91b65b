"""Lock servers, one module or package each, all under the same contract suite."""
