"""How models write tool calls and thoughts: the formats, their names, and what reads them."""
