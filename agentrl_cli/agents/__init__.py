"""One adapter per agent framework: a built object becomes something that runs on a task."""
