"""What ``authtoken`` stands on: validations in the worker of a service, and how long they stand."""
