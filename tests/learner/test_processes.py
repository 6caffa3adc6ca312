"""A sweep over the devices of two processes is the sweep over as many devices of one."""

import pickle

from process_cases import run_processes


def test_two_processes_do_bit_for_bit_what_one_does_on_as_many_devices(tmp_path):
    # And with the optimizer and the reference in the hosts' memory what is done without.
    program = "learner_process.py"
    (alone,) = run_processes(program, 1, 4, tmp_path, read=pickle.loads)
    metrics, _ = alone
    assert metrics["sweep/turns"] == 4 and metrics["sweep/kl"] > 0
    assert run_processes(program, 2, 2, tmp_path, read=pickle.loads) == [alone] * 2
