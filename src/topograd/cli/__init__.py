"""The command `topograd`: one module for each verb, and what the verbs share."""
