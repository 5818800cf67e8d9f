"""What every layer stands on: files shared by processes, locks, forks, the machine, templates."""
