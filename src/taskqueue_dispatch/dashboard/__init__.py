"""The dashboard's page about the dispatcher: models, endpoints, slots and running jobs."""
