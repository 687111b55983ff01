"""The APIs that agents speak: requests to checked form, sampled replies to JSON and events."""
