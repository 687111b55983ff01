"""What commands show: progress, results, comparisons."""
