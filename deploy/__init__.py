"""Configuration files of the servers, as templates and static files. No logic lives here."""
