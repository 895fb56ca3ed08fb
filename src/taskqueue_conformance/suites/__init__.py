"""The test suites of the conformance kit for queues, one module per topic."""
