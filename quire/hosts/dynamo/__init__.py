"""NVIDIA Dynamo: this engine as one of its workers. `backend` alone imports the `dynamo` package."""
