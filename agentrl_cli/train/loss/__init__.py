"""Advantages and losses: pure functions on small inputs, tested against numbers worked by hand."""
