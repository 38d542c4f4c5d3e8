"""Train the dual-branch model: data, trunk, branches, objective, loop, evaluation."""
