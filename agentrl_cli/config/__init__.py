"""Configuration: strict models, YAML loading with overrides, import paths."""
