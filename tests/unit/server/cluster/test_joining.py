"""Whether the live nodes, and its directory, let a node join."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from support.cluster_nodes import ClusterNode, identity_of, virtually
from support.sim_network import SimNetwork
from tidemill.control.image import MetadataImage
from tidemill.errors import ApiError, ErrorCode
from tidemill.server.cluster.joining import check_identity, greet, identify
from tidemill.server.disk.data_directory import DataDirectory, DirectoryIdentity


def test_a_node_with_another_secret_is_refused_in_words() -> None:
    async def story(network: SimNetwork) -> None:
        member = await ClusterNode(network, 1).start()
        spy = ClusterNode(network, 2, identity=identity_of(2, secret=b"guessed"))
        with pytest.raises(ApiError, match="cluster_secret_file") as caught:
            await greet({1: member.address}, spy.context)
        assert caught.value.code is ErrorCode.sasl_authentication_failed
        await member.stop()

    virtually(story)


def test_one_node_that_takes_it_is_enough_and_silence_refuses_nothing() -> None:
    async def story(network: SimNetwork) -> None:
        member = await ClusterNode(network, 1).start()
        odd = await ClusterNode(network, 3, identity=identity_of(3, secret=b"another")).start()
        joining = ClusterNode(network, 2)
        nobody = ClusterNode(network, 4).address
        await greet({}, joining.context)
        await greet({4: nobody}, joining.context)
        await greet({3: odd.address, 1: member.address, 4: nobody}, joining.context)
        with pytest.raises(ApiError):
            await greet({3: odd.address, 4: nobody}, joining.context)
        await odd.stop()
        await member.stop()

    virtually(story)


def test_a_directory_that_has_seen_more_than_etcd_has_is_refused_in_words(tmp_path: Path) -> None:
    directory = DataDirectory(tmp_path)
    seen = DirectoryIdentity(
        cluster_id="c",
        directory_id=UUID(int=1),
        node_name="n1",
        seen_revision=10,
        incarnations=(UUID(int=2),),
    )
    directory.write_identity(seen)
    image = replace(MetadataImage(), cluster_id="c", revision=9)
    with pytest.raises(ApiError, match="etcd has lost data or was restored") as caught:
        identify(directory, image, "n1", UUID)
    assert caught.value.code is ErrorCode.inconsistent_cluster_id
    assert "seen_revision to 0 and incarnations to []" in caught.value.message
    assert identify(directory, replace(image, revision=10), "n1", UUID) == seen
    # As an operator with an editor.
    file = tmp_path / "cluster-identity.json"
    edited = json.loads(file.read_text()) | {"seen_revision": 0, "incarnations": []}
    file.write_text(json.dumps(edited, indent=4) + "\n")
    accepted = identify(directory, image, "n1", UUID)
    assert (accepted.directory_id, accepted.node_name) == (UUID(int=1), "n1")
    assert (accepted.seen_revision, accepted.incarnations) == (0, ())


@pytest.mark.parametrize("seen_revision", [0, 10])
def test_a_directory_of_a_cluster_of_which_etcd_has_nothing_is_refused_before_anything_is_written(
    tmp_path: Path, seen_revision: int
) -> None:
    directory = DataDirectory(tmp_path)
    assert check_identity(directory, MetadataImage(), "n1") is None, "a new cluster"
    seen = DirectoryIdentity(
        cluster_id="c", directory_id=UUID(int=1), node_name="n1", seen_revision=seen_revision
    )
    directory.write_identity(seen)
    with pytest.raises(ApiError, match="etcd has lost data or was restored") as caught:
        check_identity(directory, MetadataImage(), "n1")
    assert caught.value.code is ErrorCode.inconsistent_cluster_id
    assert "--set cluster_name" in caught.value.message
