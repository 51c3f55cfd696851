"""xgr: batch recommendations from generative recommenders. See docs/architecture.md."""
