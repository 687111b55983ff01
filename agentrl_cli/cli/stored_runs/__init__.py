"""Commands that read a run from its folder."""
