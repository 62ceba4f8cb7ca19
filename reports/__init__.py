"""What a person reads: records of comparisons, their summary, and later reports and baselines."""
