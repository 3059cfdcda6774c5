"""Topology: compositions, configurations, the stage DAG, its plan and its closed forms. Pure Python."""
