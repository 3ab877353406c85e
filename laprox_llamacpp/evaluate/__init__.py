"""The evaluation harness: one prefill a sample, shared by all methods and budgets. docs/evaluation.md."""
