from .experiment import Experiment
def run(world, record): raise NotImplementedError
EXPERIMENT = Experiment(name="live-replay", title="t", source="s", run=run)
