"""Case tables, tolerances and expected failures that the tests share."""
