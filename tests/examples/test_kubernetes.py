"""The manifests of examples/kubernetes have only fields that their API knows, with the right types.

The models of Kubeflow Trainer's API and of Kubernetes' come from the package kubeflow-trainer-api, which is generated
from the schemas. No package has MPIJob v2beta1: its own fields are listed here, its pods use Kubernetes' models.
"""
from pathlib import Path

import pytest
import yaml

models = pytest.importorskip("kubeflow_trainer_api.models", reason="not installed: pip install kubeflow-trainer-api")

FILES = sorted((Path(__file__).parents[2] / "examples" / "kubernetes").glob("*.yaml"))
DOCUMENTS = [pytest.param(document, id=f"{file.stem}-{document['kind']}")
             for file in FILES for document in yaml.safe_load_all(file.read_text())]
MPIJOB = {"slotsPerWorker": int, "mpiImplementation": str, "sshAuthMountPath": str, "runPolicy": dict,
          "mpiReplicaSpecs": dict}


def check(model, value):
    """The model drops unknown fields, and raises a ValidationError for a wrong type."""
    assert model.from_dict(value).to_dict() == value


@pytest.mark.parametrize("document", DOCUMENTS)
def test_manifest(document):
    if document["kind"] == "NetworkPolicy":
        assert document["apiVersion"] == "networking.k8s.io/v1"
        assert set(document["spec"]) <= {"podSelector", "policyTypes", "ingress", "egress"}
    elif document["kind"] == "MPIJob":
        assert document["apiVersion"] == "kubeflow.org/v2beta1"
        assert all(isinstance(value, MPIJOB[name]) for name, value in document["spec"].items())
        replicas = document["spec"]["mpiReplicaSpecs"]
        assert set(replicas) == {"Launcher", "Worker"}
        for replica in replicas.values():
            assert set(replica) <= {"replicas", "restartPolicy", "template"}
            check(models.IoK8sApiCoreV1PodTemplateSpec, replica["template"])
    else:
        assert document["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
        check(getattr(models, f"TrainerV1alpha1{document['kind']}"), document)


def test_a_field_that_the_api_does_not_know_is_found():
    document = next(yaml.safe_load_all(FILES[-1].read_text()))
    document["spec"]["trainer"]["numWorkers"] = 2
    with pytest.raises(AssertionError):
        check(models.TrainerV1alpha1TrainJob, document)
