"""``tidemill cluster``: what an operator sees of several nodes, and does with them."""
