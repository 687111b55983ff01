"""The same run on a cluster: its processes are inside actors, wherever Ray places them."""
