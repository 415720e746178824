"""What an aggregator does: rounds, or asks without rounds; answers in the open and under masks; checks."""
