"""The tests of the conformance kit, one file per topic."""
