"""serve.sbatch and bench.sbatch, unchanged, under a real slurmctld: the behavior documented in their headers."""

from __future__ import annotations

import json
import re

import pytest

from tests.slurm.sandbox import Job, Sandbox

FAMILIES = ("attention", "moe-runner", "linear", "ops", "sampling")
QUICK = [part for family in FAMILIES for part in (f"--{family}-backend", "torch")] + ["--max-total-tokens", "4096"]
"""Torch's kernels start quickly on a busy machine; the choice of kernels is irrelevant here."""
READY = "The server is fired up and ready to roll!"
ASK = """
import json, sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=50).read().decode())
"""
FRANCE = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def question(job: Job, path: str, body: object) -> list[str]:
    """The command of a client outside the job that sends a request to the address in the job's log."""
    return ["python3", "-c", ASK, re.findall(r"http://node\d+:\d+", job.log)[-1] + path, json.dumps(body)]


def ask(cluster: Sandbox, job: Job) -> str:
    return cluster.run(*question(job, "/v1/chat/completions", FRANCE), seconds=60)


# -- serve.sbatch


@pytest.mark.drawn(1, group="slurm jobs")
def test_a_job_answers_restarts_after_a_dead_rank_and_drains_on_scancel(cluster):
    """test_scripts.py tests the limit of restarts."""
    job = cluster.submit("serve.sbatch", *QUICK, nodes=2, MAX_RESTARTS="1")
    job.until_logged(READY)
    assert "Paris" in ask(cluster, job)
    assert "Sockets between nodes have no secret" not in job.log
    shown = cluster.run("scontrol", "show", "job", "--details", str(job.number)) + cluster.run(
        "scontrol", "show", "step"
    )
    assert "DIST_SECRET" not in shown + cluster.run("ps", "-eo", "args", host="node1")
    cluster.run("pkill", "-KILL", "-f", "moe_engine.cluster.rank_main", host="node2")
    job.until_logged("back to the queue, restart 1 of 1")
    assert re.search(r"TP1 .*killed by SIGKILL on node2", job.log), job.log
    job.until(JobState="RUNNING", Restarts="1")
    job.until_logged(READY, times=2)
    assert "Paris" in ask(cluster, job)
    sampling = {"max_new_tokens": 300, "ignore_eos": True}
    before = job.log.count("Prefill batch")
    client = cluster.start(*question(job, "/generate", {"text": "Once upon a time", "sampling_params": sampling}))
    job.until_logged("Prefill batch", times=before + 1)
    job.cancel()
    answer = json.loads(client.communicate(timeout=60)[0])
    assert answer["meta_info"]["completion_tokens"] == 300
    facts = job.ended()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("CANCELLED", "0:0", "1"), job.log
    for host in ("node1", "node2"):
        assert "moe_engine" not in cluster.run("ps", "-eo", "args", host=host)


def test_wrong_flags_end_with_code_2_and_no_restart(cluster):
    job = cluster.submit("serve.sbatch", "--page-size", "many", nodes=2)
    facts = job.ended()
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "2:0", "0"), job.log
    assert "--page-size" in job.log


@pytest.mark.drawn(1, group="slurm jobs")
def test_a_node_rank_that_the_batch_shell_expanded_ends_the_start_on_all_nodes(cluster):
    """As in common guides: SLURM_NODEID is 0 in the shell of the batch script, and differs in the tasks."""
    script = cluster.folder / "guide.sbatch"
    flags = '--nnodes 2 --tp 2 --node-rank "$SLURM_NODEID" --dist-init-addr "$(hostname):20001"'
    script.write_text(f'#!/bin/bash\nsrun --ntasks-per-node=1 "$MOE_ENGINE" serve {" ".join(QUICK)} {flags}\n')
    command = ["sbatch", "--parsable", "--nodes=2", "--gres=gpu:1", "--output=guide-%j.log", str(script)]
    job = Job(cluster, int(cluster.run(*command)))
    facts = job.ended()
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "2:0"), job.log
    assert len(re.findall(r"error: .*--node-rank 0, but SLURM_NODEID=1 ", job.log)) == 2, job.log
    assert "Traceback" not in job.log


@pytest.mark.drawn(1, group="slurm jobs")
def test_a_dead_node_is_named_and_the_job_requeued_before_slurm_notices(losing_cluster):
    job = losing_cluster.submit("serve.sbatch", *QUICK, nodes=2)
    job.until_logged(READY)
    losing_cluster.kill_node("node2")
    job.until(Restarts="1")
    assert "NODE node2 does not answer" in job.log and "NODE node1" not in job.log
    assert re.search(r"TP1 .* on node2\).* silent for", job.log), job.log


# -- bench.sbatch


@pytest.mark.drawn(1, group="slurm jobs")
def test_bench_measures_and_ends_the_server(cluster):
    requests = ["--num-prompts", "4", "--random-input-len", "16", "--random-output-len", "4"]
    arguments = [*QUICK, "--", "--dataset-name", "random", *requests]
    job = cluster.submit("bench.sbatch", *arguments, nodes=2)
    facts = job.ended()
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), job.log
    results = (cluster.folder / f"moe-engine-bench-{job.number}.jsonl").read_text()
    assert json.loads(results.splitlines()[-1])["completed"] == 4
