"""Feed-forward networks, the models of the paper."""
