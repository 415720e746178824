"""C1: the members of a federation sign one list of them, and a site sums with nobody else."""

import shutil

import msgspec
import pytest
from click.testing import CliRunner

from fedtrain.cli import cli
from fedtrain.config import SitePolicy, keep_policy, policy_from
from fedtrain.errors import CertificateError, ConfigError
from fedtrain.pki import Credentials, Signer, init, issue
from fedtrain.pki.members import FILE, Consent, Members
from fedtrain.runtime.sites.approval import key_in, policy_of, sign_members

SITES = ("east", "north", "south")


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Three hospitals, each with a project folder of its own, which pin each other by what was read aloud."""
    root = tmp_path_factory.mktemp("members")
    init(root / "authority", "fed")
    folders = {}
    for site in SITES:
        made = issue(root / "authority", "site", site)
        folders[site] = root / site / "certs" / "sites" / site
        shutil.copytree(made, folders[site])
        (root / site / "fedtrain.toml").write_text('[run]\ntask = "task:T"\n')
    keys = {site: key_in(folder) for site, folder in folders.items()}
    for folder in folders.values():
        keep_policy(folder, SitePolicy(members=keys))
    return root, folders


@pytest.fixture
def sites(machines, tmp_path):
    """Copies of their folders, and the list that is passed from one to the next."""
    shutil.copytree(machines[0], tmp_path / "all", dirs_exist_ok=True)
    return {s: tmp_path / "all" / s / "certs" / "sites" / s for s in SITES}, tmp_path / "fed.members"


def known(new):
    raise AssertionError(f"all are pinned already: {new}")


def policy(folder):
    return policy_of(folder, Credentials.load(folder))


def all_sign(folders, path):
    for number, folder in enumerate(folders.values(), 1):
        assert len(sign_members(folder, path, known)) == len(SITES) - number
    for folder in folders.values():  # the complete list goes to all
        assert sign_members(folder, path, known) == []


def test_c1_a_list_that_all_members_signed_is_what_each_of_them_holds_to(sites):
    folders, path = sites
    all_sign(folders, path)
    for folder in folders.values():
        assert policy(folder).signed_members
        assert policy(folder).members == {site: key_in(each) for site, each in folders.items()}


def test_c1_a_list_without_one_of_the_signatures_is_refused_and_names_who_has_not_signed(sites):
    folders, path = sites
    all_sign(folders, path)
    whole = Members.read(path)
    for site in SITES:
        rest = {name: each for name, each in whole.signatures.items() if name != site}
        msgspec.structs.replace(whole, signatures=rest).write(folders["north"] / FILE)
        with pytest.raises(CertificateError, match=f"{site} has not signed the list of members"):
            policy(folders["north"])
    (folders["north"] / FILE).unlink()
    with pytest.raises(CertificateError, match=r"members.json is gone.*fedtrain policy sign FILE"):
        policy(folders["north"])


@pytest.mark.parametrize("change", ["added", "another key", "left out", "federation", "signer"])
def test_c1_nobody_changes_a_signed_list(sites, change):
    """Not whoever carries it, and not who has the issuing key and can certify whom he likes."""
    folders, path = sites
    all_sign(folders, path)
    whole = Members.read(path)
    mallory = issue(path.parent / "all/authority", "site", "mallory")
    members = {
        "added": {**whole.members, "mallory": key_in(mallory)},
        "another key": {**whole.members, "south": key_in(mallory)},
        "left out": {name: key for name, key in whole.members.items() if name != "south"},
    }.get(change, whole.members)
    forged = msgspec.structs.replace(
        whole, members=members, federation="other" if change == "federation" else whole.federation
    )
    if change == "added":
        forged = forged.signed_by("mallory", Signer.of(Credentials.load(mallory)))
    if change == "signer":  # who has no key of the list signs in a member's name
        own = Signer.of(Credentials.load(mallory))
        listed = {"federation": whole.federation, "members": {"mallory": key_in(mallory)}}
        key = Members(**listed).signed_by("mallory", own).signatures["mallory"].key
        stolen = Consent(key, own.sign(whole.statement))
        forged = msgspec.structs.replace(whole, signatures={**whole.signatures, "south": stolen})
    forged.write(folders["north"] / FILE)
    with pytest.raises(CertificateError, match=r"is not over this list|by no key of the list|federation"):
        policy(folders["north"])


def test_c1_another_list_that_all_signed_is_not_what_the_policy_pins(sites):
    folders, path = sites
    all_sign(folders, path)
    own = policy_from(folders["north"])
    keep_policy(folders["north"], SitePolicy(signed_members=True, members={**own.members, "x": "a" * 64}))
    with pytest.raises(CertificateError, match=r"x is pinned in the policy alone.*policy.signed_members"):
        policy(folders["north"])


def test_c1_a_person_is_asked_before_a_site_signs_for_a_member_that_it_has_not_pinned(sites):
    folders, path = sites
    sign_members(folders["east"], path, known)
    keep_policy(folders["north"], SitePolicy(members={"east": key_in(folders["east"])}))
    config = ["--config", str(folders["north"].parents[2] / "fedtrain.toml")]
    no = CliRunner().invoke(cli, ["policy", "sign", str(path), *config], input="n\n")
    assert no.exit_code
    assert key_in(folders["south"]) in no.output
    assert "north" not in Members.read(path).signatures
    yes = CliRunner().invoke(cli, ["policy", "sign", str(path), *config], input="y\n")
    assert "north has signed" in yes.output
    assert "Pass it on to south" in yes.output
    assert not policy_from(folders["north"]).signed_members


def test_c1_who_is_not_on_the_list_signs_nothing(sites):
    folders, path = sites
    keep_policy(folders["east"], SitePolicy(members={"north": key_in(folders["north"])}))
    sign_members(folders["east"], path, known)
    with pytest.raises(CertificateError, match="south is not among these members with its key"):
        sign_members(folders["south"], path, known)
    path.write_bytes(b'{"federation": "other", "members": {}}')
    with pytest.raises(ConfigError, match="is of the federation 'other'"):
        sign_members(folders["south"], path, known)
